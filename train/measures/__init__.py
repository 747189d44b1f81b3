"""What is measured of experts over held-out data: one file a measure."""
