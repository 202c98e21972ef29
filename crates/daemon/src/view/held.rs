//! `cleave resume` and `cleave fail`: what becomes of requests that are held because the disk failed them.

use std::path::PathBuf;

use cleave_api::{HeldRequests, Operation};

use super::ask;
use crate::failure::Failure;
use crate::output::print;

/// An order for all requests that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldOrder {
    /// Do them again.
    Resume,
    /// End them as I/O errors.
    Fail,
}

/// `cleave resume` or `cleave fail`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) order: HeldOrder,
    pub(crate) sockets: Vec<PathBuf>,
}

impl HeldOrder {
    fn operation(self) -> Operation {
        match self {
            HeldOrder::Resume => Operation::ResumeDisk,
            HeldOrder::Fail => Operation::FailDisk,
        }
    }

    /// The body of its request. A quiet is for whoever began it to end.
    fn body(self) -> &'static str {
        match self {
            HeldOrder::Resume => r#"{"held": true}"#,
            HeldOrder::Fail => "",
        }
    }

    fn told(self, id: &str, requests: u64) -> String {
        let id = super::screen::cut(id, usize::MAX);
        let verb = match (self, requests) {
            (_, 0) => return format!("{id}: nothing is held\n"),
            (HeldOrder::Resume, 1) => "is done again",
            (HeldOrder::Resume, _) => "are done again",
            (HeldOrder::Fail, 1) => "ends as an I/O error",
            (HeldOrder::Fail, _) => "end as I/O errors",
        };
        let noun = if requests == 1 { "request" } else { "requests" };
        format!("{id}: {requests} {noun} {verb}\n")
    }
}

/// Gives the order to all, and says of each disk what that was about. A socket without an answer is an error, after what
/// others say.
pub(crate) fn run(held: &Held) -> Result<(), Failure> {
    let (mut text, mut missing) = (String::new(), None);
    for socket in &held.sockets {
        let ordered = ask::each::<HeldRequests>(socket, held.order.operation(), held.order.body());
        match ordered {
            Ok(each) => {
                for (id, ordered) in each {
                    text += &held.order.told(&id, ordered.requests);
                }
            }
            Err(why) => {
                missing.get_or_insert(ask::unheard(socket, &why));
            }
        }
    }
    print(&text)?;
    missing.map_or(Ok(()), |why| Err(Failure::run(why)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_said() {
        let rows = [
            (HeldOrder::Resume, 0, "a: nothing is held\n"),
            (HeldOrder::Fail, 0, "a: nothing is held\n"),
            (HeldOrder::Resume, 1, "a: 1 request is done again\n"),
            (HeldOrder::Resume, 7, "a: 7 requests are done again\n"),
            (HeldOrder::Fail, 1, "a: 1 request ends as an I/O error\n"),
            (HeldOrder::Fail, 2, "a: 2 requests end as I/O errors\n"),
        ];
        for (order, requests, expected) in rows {
            assert_eq!(order.told("a", requests), expected);
        }
    }
}
