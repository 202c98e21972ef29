//! A frontend may cut the file behind guest memory while we look at it; the CPU then raises SIGBUS.
//! The handler replaces the page with anonymous zeroes, marks the region lost and returns, so that
//! the access completes (with zeroes) and the owner learns of it by [`crate::Memory::is_lost`].
//! A SIGBUS anywhere else gets the default action.
