"""Everything that knows of other processes: degrees, communication, ZeRO, sharded checkpoints."""
