"""Speedrun trains GPTs as fast as the hardware allows, measures it honestly, and shows it."""

__version__ = "0.1.0"
