"""Every message that crosses a process, one module for each kind of link. No I/O happens here."""
