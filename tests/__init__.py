"""What holds for all tests."""

import signal

# In a background job of a shell SIGINT is ignored, and so would what tests start and interrupt inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
