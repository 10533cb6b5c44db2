"""Several ranks on one GPU; the same functions run on gloo ranks as a rehearsal (make gpu)."""
