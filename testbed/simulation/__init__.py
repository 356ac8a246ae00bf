"""The simulator.

``reference`` replays requests as the paper's public simulator does; ``instance`` reads its instances.
"""
