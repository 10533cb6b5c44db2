"""Tests of paro/checkpoint/convert/."""
