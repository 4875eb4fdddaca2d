"""What a worker computes with: models, their KV, and the engines over them. Knows no scheduler and
no network."""
