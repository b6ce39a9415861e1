"""``offload demo``: the main job on real input, with every token verified."""
