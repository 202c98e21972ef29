//! House rules that neither rustc nor clippy knows.

mod circles;
mod imports;
mod names;
pub(crate) mod packages;
mod pages;
mod tree;
mod words;

use std::path::Path;

use cleave_rig::{Result, quietly};

use crate::book::index;
use crate::markdown;
use crate::step::unless;

const FILE_LINES_MAX: usize = 600;

/// Three lines each: a pattern that no line of some files may match (`-n`), or that a line of each has to match (`-L`); the
/// files; and why. The patterns are spelt so that this file passes its own rules. A list of imports could hide one that is
/// impure. Unsafe code is for the doors to guest memory and to the kernel, and for the oracle of the tests.
const RULES: &str = r"-n \b(FIX[M]E|XX[X])
:!*Cargo.lock :!LICENSE*
do it, or state the fact and its reason
-n (^|[^[:alnum:]_])/(wor[k]|roo[t]|hom[e])/
:!*Cargo.lock :!LICENSE*
this path exists on one machine only
-n ^[[:blank:]]*#\[ignore
*.rs
an ignored test never runs; finish or delete it
-n \bstd::(fs|net|thread|time|\{)
crates/blk/src/*
blk holds pure values: no files, sockets, threads or clocks
-n \bstd::(fs|io|net|process|thread|time|\{)|\b(tokio|rustix)::|\be?print(ln)?!
crates/config/src/*
config turns texts into values: no files, sockets, threads, clocks or terminal
-n \bstd::(fs|process|thread|\{)|\b(axum|tokio)::|\be?print(ln)?!
crates/api/src/*
api says what is sent and received: no files, threads, runtime or terminal
-n \bstd::(io|net|os|time)|\brustix::
crates/api/src/* :!crates/api/src/client.rs
only the client of api has sockets and clocks
-n \bclap\b|\bstdout\b|\bargs_os\b|\be?print(ln)?!
crates/host/src/*
host serves disks: no command line, and nothing printed
-L ^#!\[forbid\(unsafe_code\)\]$
*src/lib.rs *src/main.rs :!crates/guest :!crates/engine :!crates/client :!crates/rbd
#![forbid(unsafe_code)] is missing
-L ^//!.*(forbid|must.not)
crates/*/src/lib.rs crates/*/src/main.rs
the first `//!` lines do not say what the crate forbids";

/// Checks every file that git tracks or would track. Reports all faults at once, one a line.
pub(crate) fn check(root: &Path) -> Result<String> {
    let mut faults = Vec::new();
    for [pattern, files, why] in RULES.lines().collect::<Vec<_>>().as_chunks::<3>().0 {
        // Status 1 says that there is no such line, or no such file.
        let search = "git grep -IE --untracked --no-color \"$@\" || [ $? = 1 ]";
        let line = format!("sh -c {{}} sh {pattern} -- {files}");
        let found = quietly(root, &line, &[&search])?;
        faults.extend(found.lines().map(|place| format!("{place}: {why}")));
    }
    let files = "git ls-files --cached --others --exclude-standard";
    let listing = quietly(root, files, &[])?;
    let mut sources = tree::Sources::new();
    // A deleted file is listed until the deletion is staged.
    let paths: Vec<&str> = listing
        .lines()
        .filter(|path| root.join(path).exists())
        .collect();
    for path in &paths {
        // Binary files have no rules.
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_default();
        if path.ends_with(".md") {
            faults.extend(markdown::broken(root, path, &text));
        }
        if *path == index::INDEX {
            faults.extend(index::faults(root, &text, &paths));
        }
        if *path == pages::TABLE {
            faults.extend(pages::faults(root, &text, &paths));
        }
        let lines = code_lines(&text);
        let is_test = path.contains("tests/") || path.ends_with("tests.rs");
        if path.ends_with(".rs") && lines > FILE_LINES_MAX && !is_test {
            let limit = format!("the limit is {FILE_LINES_MAX}");
            faults.push(format!("{path}: {lines} lines of code; {limit}"));
        }
        if path.ends_with(".rs") && !text.is_empty() {
            faults.extend(words::faults(path, &text));
            sources.insert((*path).to_owned(), text);
        }
    }
    faults.extend(circles::tied(&sources));
    faults.extend(names::doubled(&sources));
    unless(&faults, format!("{} files", paths.len()))
}

/// Lines that are neither blank nor comments, up to the module of tests.
fn code_lines(text: &str) -> usize {
    let code = text.split("\n#[cfg(test)]\nmod tests {").next();
    let lines = code.unwrap_or(text).lines().map(str::trim);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    code.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_finds_its_fault() {
        let root = std::env::temp_dir().join(format!("xtask-tidy-{}", std::process::id()));
        let long = "use a;\n".repeat(FILE_LINES_MAX + 1);
        let tests = format!("use a;\n\n#[cfg(test)]\nmod tests {{\n{long}}}");
        for (path, text, fault) in [
            ("a.rs", concat!("a\n// FIX", "ME: later"), "a.rs:2:"),
            ("b.md", concat!("see a", "/wo", "rk/ or aX", "XX"), ""),
            ("c.md", concat!("see ", "/ro", "ot/b"), "c.md:1:"),
            ("d/Cargo.lock", concat!("X", "XX"), ""),
            ("crates/disk/src/long.rs", &long, "limit"),
            ("crates/disk/src/even.rs", &long[7..], ""),
            ("crates/disk/src/tested.rs", &tests, ""),
            ("tests/e.rs", &long, ""),
            (
                "tests/f.rs",
                "#[test]\n    #[ignore = \"slow\"]\nfn a() {}",
                "ignored",
            ),
            (
                "crates/disk/src/lib.rs",
                "//! This forbids.\n// #![forbid(unsafe_code)]\n",
                "missing",
            ),
            (
                "crates/worker/src/lib.rs",
                "//! This does.\n#![forbid(unsafe_code)]\n",
                "//!",
            ),
            ("crates/rbd/src/lib.rs", "//! This forbids things.\n", ""),
            ("xtask/src/main.rs", "", "missing"),
            ("crates/blk/src/plan.rs", "use std::{fmt, fs};", "pure"),
            ("crates/blk/src/size.rs", "use std::num::NonZero;", ""),
            (
                "crates/config/src/file.rs",
                "let text = std::fs::read(path);",
                "config",
            ),
            ("crates/config/src/disk.rs", "use std::path::PathBuf;", ""),
            (
                "crates/api/src/disk.rs",
                "use std::net::TcpStream;",
                "client",
            ),
            ("crates/api/src/client.rs", "use std::net::TcpStream;", ""),
            ("crates/host/src/serve.rs", "println!();", "nothing printed"),
            ("crates/host/src/log.rs", "writeln!(io::stderr());", ""),
            ("crates/api/src/client.rs", "use std::thread;", "api says"),
        ] {
            let file = root.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            quietly(&root, "git init --quiet", &[]).unwrap();
            std::fs::write(file, text).unwrap();
            let found = check(&root).err().unwrap_or_default();
            assert_eq!(
                found.contains(fault) && !found.is_empty(),
                !fault.is_empty(),
                "{path}: {found}"
            );
            std::fs::remove_dir_all(&root).unwrap();
        }
    }
}
