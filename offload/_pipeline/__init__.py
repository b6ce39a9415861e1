"""The pipeline: four stages in the order of a block's path (admission, awaiting, batching, transfer), linked by channels."""
