"""The sharded optimizer, loss scaling, step checks and learning-rate schedules."""
