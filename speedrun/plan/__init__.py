"""What a run would cost on a machine that need not be here: time, memory, and where both go."""
