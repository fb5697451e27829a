"""The controller's process, one for each job: collects reports, decides, and gives orders. It touches no tensor."""
