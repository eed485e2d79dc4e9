"""`longweave train`: a byte-level language model on packed documents that every machine has."""
