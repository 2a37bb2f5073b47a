"""The training loop: the objective that it trains on, the schedule, signals and several processes."""
