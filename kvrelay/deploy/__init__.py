"""Starting the processes of a cluster: models, engines, workers, and a whole cluster on one machine."""
