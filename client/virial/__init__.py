"""Client of the Virial control plane."""
