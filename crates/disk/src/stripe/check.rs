//! Decides from the superblocks whether legs form a stripe that is whole and in order.

use cleave_blk::Stripe;

use super::error::{StripeError, wrong_count};
use crate::size::format_size;
use crate::superblock::{SUPERBLOCK_BYTES, Superblock, SuperblockState};

/// Name, size and superblock of a leg.
pub(super) struct StripeMember<'a> {
    pub(super) name: &'a str,
    pub(super) size_bytes: u64,
    pub(super) found: SuperblockState,
}

/// A stripe whose legs are all present and in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) set: [u8; 16],
    pub(super) stripe: Stripe,
    pub(super) data_bytes: u64,
}

/// Checks legs that are served without superblocks: none may have one.
pub(super) fn raw(members: &[StripeMember<'_>]) -> Result<(), StripeError> {
    match members
        .iter()
        .find(|member| member.found != SuperblockState::Nothing)
    {
        None => Ok(()),
        Some(StripeMember { name, .. }) => Err(StripeError(format!(
            "leg {name} has a stripe's superblock, which --stripe-raw would let the guest overwrite; serve \
             the stripe without --stripe-raw"
        ))),
    }
}

/// Checks the legs in the given order. `chunk_bytes`: the stripe's chunk according to the operator.
pub(super) fn whole(
    members: &[StripeMember<'_>],
    chunk_bytes: Option<u32>,
) -> Result<Whole, StripeError> {
    let majority = majority(members)?;
    let mut legs = Vec::with_capacity(members.len());
    for member in members {
        legs.push((member.name, of_set(member, &majority)?.leg));
    }
    refuse_copies(&legs)?;
    let Superblock { stripe, .. } = majority.superblock;
    refuse_gaps(&legs, stripe)?;
    let created = stripe.chunk_bytes();
    if let Some(asked) = chunk_bytes.filter(|asked| *asked != created) {
        let (name, created) = (majority.name, format_size(created.into()));
        return Err(StripeError(format!(
            "this stripe ({name}) has chunks of {created}, not {}; serve it with --stripe {created}",
            format_size(asked.into())
        )));
    }
    refuse_disorder(&legs)?;
    Ok(Whole {
        set: majority.superblock.set,
        stripe,
        data_bytes: majority.superblock.data_bytes,
    })
}

/// The set to which most legs belong, and its first leg.
struct Majority<'a> {
    name: &'a str,
    superblock: Superblock,
}

/// Sets are distinguished by their id and by the values that are the same on all legs.
fn same_set(a: &Superblock, b: &Superblock) -> bool {
    a.set == b.set && a.stripe == b.stripe && a.data_bytes == b.data_bytes
}

fn majority<'a>(members: &[StripeMember<'a>]) -> Result<Majority<'a>, StripeError> {
    let mut best: Option<(usize, Majority<'a>)> = None;
    for member in members {
        let SuperblockState::Whole(superblock) = member.found else {
            continue;
        };
        let is_like = |other: &&StripeMember<'_>| match &other.found {
            SuperblockState::Whole(theirs) => same_set(theirs, &superblock),
            _ => false,
        };
        let votes = members.iter().filter(is_like).count();
        if best.as_ref().is_none_or(|(most, _)| votes > *most) {
            let name = member.name;
            best = Some((votes, Majority { name, superblock }));
        }
    }
    if let Some((_, majority)) = best {
        return Ok(majority);
    }
    // None is whole. A leg with a damaged superblock gives a better message than one without.
    let something = members
        .iter()
        .find(|member| member.found != SuperblockState::Nothing);
    Err(match something.or(members.first()) {
        Some(member) => refusal(member, 0).unwrap_or_else(|| {
            StripeError(format!(
                "leg {} has no superblock, nor has any other; create the stripe (all data of the legs is lost) \
                 by `cleave stripe create`, or serve them as they are with --stripe-raw",
                member.name
            ))
        }),
        None => wrong_count(0),
    })
}

/// Returns why a leg cannot be used in any set; `None` if it has a whole superblock or none.
fn refusal(member: &StripeMember<'_>, wanted_bytes: u64) -> Option<StripeError> {
    let (name, size_bytes) = (member.name, member.size_bytes);
    let why = match member.found {
        SuperblockState::Damaged => {
            format!("the superblock of leg {name} is damaged; restore its last 4 KiB from a copy")
        }
        SuperblockState::Version(version) => format!(
            "the superblock of leg {name} has version {version}; serve it with a newer cleave"
        ),
        _ if size_bytes < wanted_bytes => format!(
            "leg {name} was cut short: it has {size_bytes} bytes, and its stripe needs {wanted_bytes} of \
             it; restore it from a copy"
        ),
        _ => return None,
    };
    Some(StripeError(why))
}

fn of_set(member: &StripeMember<'_>, majority: &Majority<'_>) -> Result<Superblock, StripeError> {
    let (name, other) = (member.name, majority.name);
    let why = match member.found {
        SuperblockState::Whole(found) if !same_set(&found, &majority.superblock) => {
            format!(
                "leg {name} belongs to another stripe than {other}; name the legs of one stripe"
            )
        }
        found => match (
            refusal(member, majority.superblock.data_bytes + SUPERBLOCK_BYTES),
            found,
        ) {
            // This also refuses a leg that has a copy of a superblock without the data.
            (Some(refused), _) => return Err(refused),
            (None, SuperblockState::Whole(found)) => return Ok(found),
            (None, _) => format!(
                "leg {name} has no superblock at its end: it does not belong to this stripe, or its size was \
                 changed; name the right one, or give it the size that it had"
            ),
        },
    };
    Err(StripeError(why))
}

fn refuse_copies(legs: &[(&str, u32)]) -> Result<(), StripeError> {
    for (at, (name, leg)) in legs.iter().enumerate() {
        if let Some((other, _)) = legs.iter().take(at).find(|(_, before)| before == leg) {
            return Err(StripeError(format!(
                "legs {name} and {other} are both leg {} of this stripe, one a copy; name one of them",
                leg + 1
            )));
        }
    }
    Ok(())
}

fn refuse_gaps(legs: &[(&str, u32)], stripe: Stripe) -> Result<(), StripeError> {
    let missing: Vec<_> = (0..u32::from(stripe.legs()))
        .filter(|leg| legs.iter().all(|(_, there)| there != leg))
        .map(|leg| (leg + 1).to_string())
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(StripeError(format!(
            "leg {} of this stripe's {} is missing; name it together with {}",
            missing.join(", "),
            stripe.legs(),
            legs.first().map_or("", |(name, _)| name)
        ))),
    }
}

fn refuse_disorder(legs: &[(&str, u32)]) -> Result<(), StripeError> {
    let stray = legs.iter().zip(0..).find(|((_, leg), at)| leg != at);
    let Some(((name, leg), at)) = stray else {
        return Ok(());
    };
    let mut right = legs.to_vec();
    right.sort_by_key(|(_, leg)| *leg);
    let words: Vec<_> = right
        .iter()
        .map(|(name, _)| format!("--disk {name}"))
        .collect();
    Err(StripeError(format!(
        "leg {name} is named in place {} but is leg {}; the right order: {}",
        at + 1,
        leg + 1,
        words.join(" ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn leg(leg: u32) -> Superblock {
        Superblock {
            set: [7; 16],
            leg,
            stripe: Stripe::new(3, 64 << 10).unwrap(),
            data_bytes: MIB - (64 << 10),
            leg_bytes: MIB,
        }
    }

    fn check(
        found: &[(&str, u64, SuperblockState)],
        chunk: Option<u32>,
    ) -> Result<Whole, StripeError> {
        let members: Vec<_> = found
            .iter()
            .map(|&(name, size_bytes, found)| StripeMember {
                name,
                size_bytes,
                found,
            })
            .collect();
        whole(&members, chunk)
    }

    #[test]
    fn whole_and_in_order_is_a_stripe() {
        let legs = [0, 1, 2].map(|n| {
            (
                ["a", "b", "c"][n as usize],
                MIB,
                SuperblockState::Whole(leg(n)),
            )
        });
        for chunk in [None, Some(64 << 10)] {
            let whole = check(&legs, chunk).unwrap();
            assert_eq!((whole.set, whole.data_bytes), ([7; 16], MIB - (64 << 10)));
        }
    }

    /// Wrong legs, and the words that the message must contain.
    #[test]
    #[allow(clippy::too_many_lines)] // a table
    fn wrong_legs_are_refused_by_leg_and_remedy() {
        let good = |n: u32| SuperblockState::Whole(leg(n));
        let foreign = SuperblockState::Whole(Superblock {
            set: [8; 16],
            ..leg(1)
        });
        let other_chunk = SuperblockState::Whole(Superblock {
            stripe: Stripe::new(3, 4096).unwrap(),
            ..leg(1)
        });
        let none = SuperblockState::Nothing;
        type Row<'a> = (&'a [(&'a str, u64, SuperblockState)], &'a [&'a str]);
        let table: [Row<'_>; 16] = [
            (
                &[
                    ("a", MIB, good(0)),
                    ("c", MIB, good(2)),
                    ("b", MIB, good(1)),
                ],
                &[
                    "leg c",
                    "place 2 but is leg 3",
                    "--disk a --disk b --disk c",
                ],
            ),
            (
                &[("a", MIB, good(0)), ("c", MIB, good(2))],
                &["leg 2 of this stripe's 3 is missing", "with a"],
            ),
            (&[("c", MIB, good(2))], &["leg 1, 2 of this stripe's 3"]),
            (
                &[
                    ("a", MIB, good(0)),
                    ("x", MIB, foreign),
                    ("c", MIB, good(2)),
                ],
                &["leg x belongs to another stripe than a"],
            ),
            // The majority is right, wherever it is.
            (
                &[
                    ("x", MIB, foreign),
                    ("a", MIB, good(0)),
                    ("c", MIB, good(2)),
                ],
                &["leg x belongs to another stripe than a"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, other_chunk),
                    ("c", MIB, good(2)),
                ],
                &["leg b belongs to another stripe"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB / 2, none),
                    ("c", MIB, good(2)),
                ],
                &["leg b was cut short", "524288 bytes", "needs 987136"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB / 2, good(1)),
                    ("c", MIB, good(2)),
                ],
                &["leg b was cut short"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", 2 * MIB, none),
                    ("c", MIB, good(2)),
                ],
                &["leg b has no superblock at its end", "size"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, good(1)),
                    ("d", MIB, good(1)),
                ],
                &["legs d and b are both leg 2", "name one"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, SuperblockState::Damaged),
                    ("c", MIB, good(2)),
                ],
                &["superblock of leg b is damaged"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, SuperblockState::Version(2)),
                    ("c", MIB, good(2)),
                ],
                &["leg b has version 2", "newer"],
            ),
            (
                &[("a", MIB, none), ("b", MIB, none)],
                &[
                    "leg a has no superblock",
                    "cleave stripe create",
                    "--stripe-raw",
                ],
            ),
            (
                &[("a", MIB, none), ("b", MIB, SuperblockState::Damaged)],
                &["superblock of leg b is damaged"],
            ),
            (
                &[("a", MIB, none), ("b", MIB, SuperblockState::Version(9))],
                &["leg b has version 9"],
            ),
            (&[], &["2 to 64 legs"]),
        ];
        for (legs, wanted) in table {
            let line = check(legs, Some(64 << 10)).unwrap_err().to_string();
            for words in wanted {
                assert!(line.contains(words), "{words:?} in: {line}");
            }
            assert!(!line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn the_error_for_a_wrong_chunk_names_the_right_one() {
        let legs = [0, 1, 2].map(|n| ("a", MIB, SuperblockState::Whole(leg(n))));
        let line = check(&legs, Some(128 << 10)).unwrap_err().to_string();
        assert!(
            line.contains("chunks of 64K, not 128K; serve it with --stripe 64K"),
            "{line}"
        );
    }

    #[test]
    fn raw_legs_have_no_superblock() {
        let member = |found| StripeMember {
            name: "b",
            size_bytes: MIB,
            found,
        };
        assert_eq!(raw(&[member(SuperblockState::Nothing)]), Ok(()));
        for found in [
            SuperblockState::Whole(leg(0)),
            SuperblockState::Damaged,
            SuperblockState::Version(2),
        ] {
            let line = raw(&[member(SuperblockState::Nothing), member(found)])
                .unwrap_err()
                .to_string();
            assert!(
                line.contains("leg b") && line.contains("without --stripe-raw"),
                "{line}"
            );
        }
    }
}
