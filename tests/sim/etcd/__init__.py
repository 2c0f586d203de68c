"""A fake etcd: what its members say, message for message, over a model of what its Raft promises."""
