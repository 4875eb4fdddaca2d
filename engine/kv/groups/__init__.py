"""One file for each rule by which layers keep KV."""
