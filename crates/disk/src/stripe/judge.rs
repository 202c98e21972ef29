//! Whether legs are one stripe, whole and in order: a judgement on what was read from them.

use cleave_blk::Stripe;

use crate::spec::format_size;
use crate::superblock::{Found, SUPERBLOCK_BYTES, Superblock};

/// Why legs are no stripe. Each line names the leg and the remedy; legs are counted from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StripeError {
    /// Too few or too many.
    #[error("a stripe has 2 to 64 legs, and this one would have {legs}; name each of its legs")]
    Legs {
        /// How many.
        legs: u16,
    },
    /// An impossible chunk.
    #[error("a stripe's chunk is a power of two from 4K to 4M, and not {chunk_bytes} bytes")]
    Chunk {
        /// Asked for.
        chunk_bytes: u32,
    },
    /// A leg that is neither file nor device.
    #[error("{name} cannot be a leg of a stripe; name files or block devices")]
    Kind {
        /// The leg.
        name: String,
    },
    /// The same file or device under two names, or one name given twice.
    #[error("leg {name} is the same as leg {other}; name each leg once")]
    Twice {
        /// The leg.
        name: String,
        /// Its first name.
        other: String,
    },
    /// A chunk smaller than a leg's block.
    #[error(
        "a chunk of {chunk} is smaller than the block of leg {name}, {block}; \
         create the stripe with --chunk {block} or more"
    )]
    Block {
        /// The leg.
        name: String,
        /// The stripe's chunk.
        chunk: String,
        /// The leg's block.
        block: String,
    },
    /// No room for a chunk.
    #[error(
        "leg {name} has {size_bytes} bytes, too few for a chunk and a superblock; make it larger"
    )]
    Small {
        /// The leg.
        name: String,
        /// Its size.
        size_bytes: u64,
    },
    /// More than offsets reach.
    #[error("the legs together have 2^63 bytes or more; use smaller or fewer ones")]
    Huge,
    /// None of the legs has a superblock.
    #[error(
        "leg {name} has no superblock, nor has any other; make the stripe (all is lost that the legs \
         hold) by `cleave stripe create`, or serve them as they are with --stripe-raw"
    )]
    Plain {
        /// The first leg.
        name: String,
    },
    /// Shorter than the set's data.
    #[error(
        "leg {name} was cut short: it has {size_bytes} bytes, and its stripe needs {wanted_bytes} of \
         it; restore it from a copy"
    )]
    Truncated {
        /// The leg.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// What the others say.
        wanted_bytes: u64,
    },
    /// Others have one.
    #[error(
        "leg {name} has no superblock at its end: it is not of this stripe, or its size was changed \
         since; name the right one, or give it the size that it had"
    )]
    NoSuperblock {
        /// The leg.
        name: String,
    },
    /// One that does not add up.
    #[error("the superblock of leg {name} is damaged; restore its last 4 KiB from a copy")]
    Damaged {
        /// The leg.
        name: String,
    },
    /// Of a later program.
    #[error("the superblock of leg {name} has version {version}; serve it with a newer cleave")]
    Version {
        /// The leg.
        name: String,
        /// Its version.
        version: u32,
    },
    /// Of another set.
    #[error("leg {name} is of another stripe than {other}; name the legs of one stripe")]
    Foreign {
        /// The leg.
        name: String,
        /// One of the set that most legs are of.
        other: String,
    },
    /// A copy beside its original.
    #[error(
        "legs {name} and {other} are both leg {leg} of this stripe, one a copy; name one of them"
    )]
    Copy {
        /// The leg.
        name: String,
        /// The one named before.
        other: String,
        /// Which leg both are.
        leg: u32,
    },
    /// Not all there.
    #[error("leg {missing} of this stripe's {legs} is missing; it has to be named with {present}")]
    Missing {
        /// Which, as a list.
        missing: String,
        /// How many there are.
        legs: u16,
        /// The first that was named.
        present: String,
    },
    /// Another chunk than it was created with.
    #[error(
        "this stripe ({name}) has chunks of {created}, and not {asked}; serve it with --stripe {created}"
    )]
    Changed {
        /// The first leg.
        name: String,
        /// The superblock's.
        created: String,
        /// Asked for.
        asked: String,
    },
    /// In another order.
    #[error("leg {name} was named at place {place} and is leg {leg}; the right order: {order}")]
    Order {
        /// The first that is out of place.
        name: String,
        /// Where it was named.
        place: usize,
        /// Which it is.
        leg: u32,
        /// The right order.
        order: String,
    },
    /// `create` on a leg of a stripe.
    #[error(
        "{name} is a leg of a stripe already; with --force a new stripe is made of it, and all is lost \
         that the old one holds"
    )]
    Member {
        /// The leg.
        name: String,
    },
    /// `create` on something that is not empty.
    #[error(
        "{name} holds data at its beginning; with --force it becomes a leg, and all is lost that it holds"
    )]
    Data {
        /// The leg.
        name: String,
    },
    /// Served raw although it has a superblock.
    #[error(
        "leg {name} has a stripe's superblock, which --stripe-raw would let the guest overwrite; serve \
         the stripe without --stripe-raw"
    )]
    NotRaw {
        /// The leg.
        name: String,
    },
}

/// What was read from a leg.
pub(super) struct Member<'a> {
    pub(super) name: &'a str,
    pub(super) size_bytes: u64,
    pub(super) found: Found,
}

/// A stripe all of whose legs are there, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) set: [u8; 16],
    pub(super) stripe: Stripe,
    pub(super) data_bytes: u64,
}

/// Legs served without superblocks: none may have one.
pub(super) fn raw(members: &[Member<'_>]) -> Result<(), StripeError> {
    match members.iter().find(|member| member.found != Found::Nothing) {
        None => Ok(()),
        Some(member) => Err(StripeError::NotRaw {
            name: member.name.to_owned(),
        }),
    }
}

/// Judges the legs as named. `chunk_bytes`: what the operator says that the stripe's chunk is.
pub(super) fn whole(
    members: &[Member<'_>],
    chunk_bytes: Option<u32>,
) -> Result<Whole, StripeError> {
    let model = model(members)?;
    let mut legs = Vec::with_capacity(members.len());
    for member in members {
        legs.push((member.name, of_set(member, &model)?.leg));
    }
    refuse_copies(&legs)?;
    let Superblock { stripe, .. } = model.superblock;
    refuse_gaps(&legs, stripe)?;
    let created = stripe.chunk_bytes();
    if let Some(asked) = chunk_bytes.filter(|asked| *asked != created) {
        return Err(StripeError::Changed {
            name: model.name.to_owned(),
            created: format_size(created.into()),
            asked: format_size(asked.into()),
        });
    }
    refuse_disorder(&legs)?;
    Ok(Whole {
        set: model.superblock.set,
        stripe,
        data_bytes: model.superblock.data_bytes,
    })
}

/// A leg of the set that most legs are of, and the first of those.
struct Model<'a> {
    name: &'a str,
    superblock: Superblock,
}

/// Sets are told apart by their id and what must be the same on all legs.
fn same_set(a: &Superblock, b: &Superblock) -> bool {
    a.set == b.set && a.stripe == b.stripe && a.data_bytes == b.data_bytes
}

fn model<'a>(members: &[Member<'a>]) -> Result<Model<'a>, StripeError> {
    let mut best: Option<(usize, Model<'a>)> = None;
    for member in members {
        let Found::Whole(superblock) = member.found else {
            continue;
        };
        let is_like = |other: &&Member<'_>| match &other.found {
            Found::Whole(theirs) => same_set(theirs, &superblock),
            _ => false,
        };
        let votes = members.iter().filter(is_like).count();
        if best.as_ref().is_none_or(|(most, _)| votes > *most) {
            let name = member.name;
            best = Some((votes, Model { name, superblock }));
        }
    }
    if let Some((_, model)) = best {
        return Ok(model);
    }
    // None is whole: the first that is something at all says more than one that is nothing.
    let something = members.iter().find(|member| member.found != Found::Nothing);
    Err(match something.or(members.first()) {
        Some(member) => refusal(member, 0).unwrap_or(StripeError::Plain {
            name: member.name.to_owned(),
        }),
        None => StripeError::Legs { legs: 0 },
    })
}

/// Why a leg has no usable superblock; `None` where it is merely plain.
fn refusal(member: &Member<'_>, wanted_bytes: u64) -> Option<StripeError> {
    let name = member.name.to_owned();
    match member.found {
        Found::Damaged => Some(StripeError::Damaged { name }),
        Found::Version(version) => Some(StripeError::Version { name, version }),
        _ if member.size_bytes < wanted_bytes => Some(StripeError::Truncated {
            name,
            size_bytes: member.size_bytes,
            wanted_bytes,
        }),
        _ => None,
    }
}

fn of_set(member: &Member<'_>, model: &Model<'_>) -> Result<Superblock, StripeError> {
    let name = || member.name.to_owned();
    let wanted_bytes = model.superblock.data_bytes + SUPERBLOCK_BYTES;
    match member.found {
        Found::Whole(found) if same_set(&found, &model.superblock) => {
            // The superblock came along (a copy of its last block), the data between did not.
            match member.size_bytes < wanted_bytes {
                true => Err(refusal(member, wanted_bytes)
                    .unwrap_or(StripeError::NoSuperblock { name: name() })),
                false => Ok(found),
            }
        }
        Found::Whole(_) => Err(StripeError::Foreign {
            name: name(),
            other: model.name.to_owned(),
        }),
        _ => {
            Err(refusal(member, wanted_bytes).unwrap_or(StripeError::NoSuperblock { name: name() }))
        }
    }
}

fn refuse_copies(legs: &[(&str, u32)]) -> Result<(), StripeError> {
    for (at, (name, leg)) in legs.iter().enumerate() {
        if let Some((other, _)) = legs.iter().take(at).find(|(_, before)| before == leg) {
            return Err(StripeError::Copy {
                name: (*name).to_owned(),
                other: (*other).to_owned(),
                leg: leg + 1,
            });
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
        false => Err(StripeError::Missing {
            missing: missing.join(", "),
            legs: stripe.legs(),
            present: legs.first().map_or("", |(name, _)| name).to_owned(),
        }),
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
    Err(StripeError::Order {
        name: (*name).to_owned(),
        place: at as usize + 1,
        leg: leg + 1,
        order: words.join(" "),
    })
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

    fn judge(found: &[(&str, u64, Found)], chunk: Option<u32>) -> Result<Whole, StripeError> {
        let members: Vec<_> = found
            .iter()
            .map(|&(name, size_bytes, found)| Member {
                name,
                size_bytes,
                found,
            })
            .collect();
        whole(&members, chunk)
    }

    #[test]
    fn whole_and_in_order_is_a_stripe() {
        let legs = [0, 1, 2].map(|n| (["a", "b", "c"][n as usize], MIB, Found::Whole(leg(n))));
        for chunk in [None, Some(64 << 10)] {
            let whole = judge(&legs, chunk).unwrap();
            assert_eq!((whole.set, whole.data_bytes), ([7; 16], MIB - (64 << 10)));
        }
    }

    /// What is wrong, and the words that the line must have.
    #[test]
    fn what_is_no_stripe_is_refused_by_leg_and_remedy() {
        let good = |n: u32| Found::Whole(leg(n));
        let foreign = Found::Whole(Superblock {
            set: [8; 16],
            ..leg(1)
        });
        let other_chunk = Found::Whole(Superblock {
            stripe: Stripe::new(3, 4096).unwrap(),
            ..leg(1)
        });
        let none = Found::Nothing;
        type Row<'a> = (&'a [(&'a str, u64, Found)], &'a [&'a str]);
        let table: [Row<'_>; 16] = [
            (
                &[
                    ("a", MIB, good(0)),
                    ("c", MIB, good(2)),
                    ("b", MIB, good(1)),
                ],
                &[
                    "leg c",
                    "place 2 and is leg 3",
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
                &["leg x is of another stripe than a"],
            ),
            // The majority is right, wherever it stands.
            (
                &[
                    ("x", MIB, foreign),
                    ("a", MIB, good(0)),
                    ("c", MIB, good(2)),
                ],
                &["leg x is of another stripe than a"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, other_chunk),
                    ("c", MIB, good(2)),
                ],
                &["leg b is of another stripe"],
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
                    ("b", MIB, Found::Damaged),
                    ("c", MIB, good(2)),
                ],
                &["superblock of leg b is damaged"],
            ),
            (
                &[
                    ("a", MIB, good(0)),
                    ("b", MIB, Found::Version(2)),
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
                &[("a", MIB, none), ("b", MIB, Found::Damaged)],
                &["superblock of leg b is damaged"],
            ),
            (
                &[("a", MIB, none), ("b", MIB, Found::Version(9))],
                &["leg b has version 9"],
            ),
            (&[], &["2 to 64 legs"]),
        ];
        for (legs, wanted) in table {
            let line = judge(legs, Some(64 << 10)).unwrap_err().to_string();
            for words in wanted {
                assert!(line.contains(words), "{words:?} in: {line}");
            }
            assert!(!line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn a_changed_chunk_is_told_with_the_right_one() {
        let legs = [0, 1, 2].map(|n| ("a", MIB, Found::Whole(leg(n))));
        let line = judge(&legs, Some(128 << 10)).unwrap_err().to_string();
        assert!(
            line.contains("chunks of 64K, and not 128K; serve it with --stripe 64K"),
            "{line}"
        );
    }

    #[test]
    fn raw_legs_have_no_superblock() {
        let member = |found| Member {
            name: "b",
            size_bytes: MIB,
            found,
        };
        assert_eq!(raw(&[member(Found::Nothing)]), Ok(()));
        for found in [Found::Whole(leg(0)), Found::Damaged, Found::Version(2)] {
            let line = raw(&[member(Found::Nothing), member(found)])
                .unwrap_err()
                .to_string();
            assert!(
                line.contains("leg b") && line.contains("without --stripe-raw"),
                "{line}"
            );
        }
    }
}
