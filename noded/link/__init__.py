"""The streams to the controller: dialling, sending, hearing. `convert` alone knows their wire form."""
