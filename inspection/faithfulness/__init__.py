"""Whether attention explains a prediction."""
