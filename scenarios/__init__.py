"""Shipped data: scenario files (``*.toml``) and model, hardware and calibration profiles (``profiles/``)."""
