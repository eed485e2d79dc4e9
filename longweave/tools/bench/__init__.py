"""`longweave bench`: what it costs here, as ratios measured in one run."""
