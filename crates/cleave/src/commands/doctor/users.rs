//! Users and groups of this host, from its files: those that matter here are local.

use std::fs;

use rustix::process::{getegid, geteuid, getgroups};

/// A user with the groups of its processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gids: Vec<u32>,
}

impl User {
    /// A user who has a right only where all have it.
    pub(super) fn nobody() -> User {
        User {
            name: "nobody".to_owned(),
            uid: u32::MAX - 1,
            gids: Vec::new(),
        }
    }

    /// The user that runs this program.
    pub(super) fn current() -> User {
        let uid = geteuid().as_raw();
        let mut gids = vec![getegid().as_raw()];
        gids.extend(
            getgroups()
                .unwrap_or_default()
                .iter()
                .map(|gid| gid.as_raw()),
        );
        let passwd = read("/etc/passwd");
        let name = rows(&passwd).find(|row| number(row, 2) == Some(uid));
        let name = name.and_then(|row| row.first().map(|name| (*name).to_owned()));
        User {
            name: name.unwrap_or_else(|| uid.to_string()),
            uid,
            gids,
        }
    }

    /// A user by its name or its number.
    pub(super) fn named(wanted: &str) -> Option<User> {
        User::listed(wanted, &read("/etc/passwd"), &read("/etc/group"))
    }

    fn listed(wanted: &str, passwd: &str, group: &str) -> Option<User> {
        let uid: Option<u32> = wanted.parse().ok();
        let is_wanted = |row: &Vec<&str>| {
            row.first() == Some(&wanted) || uid.is_some() && number(row, 2) == uid
        };
        let row = rows(passwd).find(is_wanted)?;
        let name = (*row.first()?).to_owned();
        let mut gids = vec![number(&row, 3)?];
        let is_member = |row: &Vec<&str>| members(row).any(|member| member == name);
        gids.extend(
            rows(group)
                .filter(is_member)
                .filter_map(|row| number(&row, 2)),
        );
        Some(User {
            uid: number(&row, 2)?,
            name,
            gids,
        })
    }
}

/// Number of a group.
pub(super) fn group(name: &str) -> Option<u32> {
    let groups = read("/etc/group");
    let row = rows(&groups).find(|row| row.first() == Some(&name))?;
    number(&row, 2)
}

/// Name of a group, or its number.
pub(super) fn group_name(gid: u32) -> String {
    let groups = read("/etc/group");
    let row = rows(&groups).find(|row| number(row, 2) == Some(gid));
    let name = row.and_then(|row| row.first().map(|name| (*name).to_owned()));
    name.unwrap_or_else(|| gid.to_string())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect())
}

fn number(row: &[&str], column: usize) -> Option<u32> {
    row.get(column)?.parse().ok()
}

fn members<'a>(row: &[&'a str]) -> impl Iterator<Item = &'a str> + use<'a> {
    row.get(3).copied().unwrap_or_default().split(',')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_own_group_and_those_that_list_it() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nqemu:x:107:108::/:/bin/false\n";
        let group =
            "root:x:0:\nqemu:x:108:\nkvm:x:36:qemu,other\ncleave:x:990:other,qemu\nx:x:5:qemuu\n";
        let qemu = User {
            name: "qemu".to_owned(),
            uid: 107,
            gids: vec![108, 36, 990],
        };
        assert_eq!(User::listed("qemu", passwd, group), Some(qemu.clone()));
        assert_eq!(User::listed("107", passwd, group), Some(qemu));
        assert_eq!(User::listed("nobody", passwd, group), None);
    }
}
