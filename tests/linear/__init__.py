"""Whether a history of client operations could have been one after another: a checker, models, and a recorder."""
