//! Rows that send one chain, directly or through an indirect table.

use cleave_client::Descriptor;
use cleave_tests::{Daemon, Outcome, Row, row};

use crate::attack::{Expect, HostileChain, INDIRECT, Parts, entry, shoot};

/// A row of which the name says whether its chain is an ordinary one, which has to be served.
pub(crate) fn chain_row(
    name: impl Into<String>,
    check: impl Fn(&Daemon) -> Outcome + Send + 'static,
) -> Row {
    let made = row(name, check);
    match made.name.ends_with("is served") {
        true => made.specified("virtio 1.3 §2.7.4.1"),
        false => made,
    }
}

/// A row that sends a read with a descriptor table built by `table`.
pub(crate) fn direct(
    rows: &mut Vec<Row>,
    name: impl Into<String>,
    expect: Expect,
    table: impl Fn(Parts) -> Vec<Descriptor> + Send + 'static,
) {
    let aim = move |parts| HostileChain::read(table(parts));
    rows.push(chain_row(name, move |daemon| shoot(daemon, expect, &aim)));
}

/// A row that sends a chain through an indirect table.
pub(crate) fn through(
    rows: &mut Vec<Row>,
    name: impl Into<String>,
    expect: Expect,
    table: impl Fn(Parts) -> Vec<Descriptor> + Send + 'static,
) {
    let aim = move |parts: Parts| {
        let indirect = table(parts);
        let head = entry(parts.table, 16 * indirect.len() as u32, INDIRECT, 0);
        HostileChain::read_through(head, indirect)
    };
    rows.push(chain_row(name, move |daemon| shoot(daemon, expect, &aim)));
}

pub(crate) fn changed(
    parts: Parts,
    index: usize,
    change: impl Fn(&mut Descriptor),
) -> Vec<Descriptor> {
    let mut table = parts.usual().to_vec();
    change(&mut table[index]);
    table
}
