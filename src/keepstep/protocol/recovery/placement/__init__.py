"""Who is where: nodes, devices, workers, ranks; which process is started where, and what is better left alone."""
