"""What a run takes: parameters, memory, operations and time."""
