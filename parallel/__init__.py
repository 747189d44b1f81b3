"""Training over several processes: parallel layouts, communication, ZeRO, sharded checkpoints."""
