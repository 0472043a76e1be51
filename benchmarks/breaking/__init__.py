"""What a death costs, stage by stage."""
