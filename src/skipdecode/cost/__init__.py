"""What a step and a prompt of a model cost, measured, and the schedule that reaches a speed-up."""
