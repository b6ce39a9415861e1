"""The rooms of a pipeline, in walking order: admission, awaiting, batching, transfer."""
