# Proves that an accelerator runs a guest at all. There is no disk.
mark alive
poweroff -f
