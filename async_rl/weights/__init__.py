"""Publication of weights: broadcast groups per membership epoch, and snapshots for late joiners."""
