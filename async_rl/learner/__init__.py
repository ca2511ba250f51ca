"""The learner: batches, model, updates and the training loop."""
