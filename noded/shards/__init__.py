"""Shards on this node: verified before a rank starts from them, given a directory, dropped when no one needs them."""
