"""What fits where and how long it takes: the request made of a configuration, and the measured rates of a machine."""
