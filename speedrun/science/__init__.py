"""Does it help? Races, ablations and verification: equal data, several seeds, an interval."""
