"""Small scripts behind `./run`: each is one task, run with the project's own Python."""
