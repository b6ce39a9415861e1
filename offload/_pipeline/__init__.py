"""The pipeline: four stages in the order of a block's way (admission, awaiting, batching, transfer), and what links them."""
