"""Ways to start learner and generators together."""
