"""Does it help? Races, ablations, tuning, verification: equal data, several seeds, an interval."""
