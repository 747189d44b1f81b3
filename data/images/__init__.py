"""Images: sources that are read in place, an index of them, decoding and augmentation."""
