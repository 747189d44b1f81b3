"""What is learned: samples, losses and scores."""
