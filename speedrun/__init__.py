"""Speedrun trains GPTs as fast as the hardware allows, measures it honestly, and shows it."""

__version__ = "0.2.0"
