"""Model computation of a worker: models, their KV, and the engines over them. Independent of
schedulers and networks."""
