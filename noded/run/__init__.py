"""What runs tasks: the guardian and its helpers, and the client noded talks to it with."""
