//! `cargo xtask dist`: a tree of all files as they are installed, and from it a tarball, a `.deb` and a `.rpm`.
//!
//! The program links the C library dynamically, and nothing else but libgcc_s: a statically linked glibc could load no
//! library at run time, and the packages name the oldest glibc that will do.

mod check;
mod notice;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::step::{At, Result, empty_folder, line, quietly, step};
use crate::{built, setup};

/// Where to, and from what.
#[derive(clap::Args, Default)]
pub(crate) struct Request {
    /// Write to this folder [default: target/dist]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package this program instead of building it
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Then install the .deb in a copy of this system (as root), and check what is installed
    #[arg(long)]
    check: bool,
}

impl Request {
    /// As the tests ask for it.
    pub(crate) fn checked() -> Request {
        Request {
            check: true,
            ..Request::default()
        }
    }
}

/// Files of the sources, and where they are installed.
const FILES: &[(&str, &str)] = &[
    (
        "dist/cleave.service",
        "usr/lib/systemd/system/cleave.service",
    ),
    (
        "dist/cleave@.service",
        "usr/lib/systemd/system/cleave@.service",
    ),
    (
        "dist/cleave@.socket",
        "usr/lib/systemd/system/cleave@.socket",
    ),
    ("dist/cleave.sysusers", "usr/lib/sysusers.d/cleave.conf"),
    ("dist/cleave.tmpfiles", "usr/lib/tmpfiles.d/cleave.conf"),
    (
        "dist/50-cleave.json",
        "usr/share/qemu/vhost-user/50-cleave.json",
    ),
    ("dist/copyright", "usr/share/doc/cleave/copyright"),
    ("LICENSE-APACHE", "usr/share/doc/cleave/LICENSE-APACHE"),
    ("LICENSE-MIT", "usr/share/doc/cleave/LICENSE-MIT"),
    ("docs/install.md", "usr/share/doc/cleave/install.md"),
];

/// Completions as the program writes them, and where shells look for them.
const COMPLETIONS: &[(&str, &str)] = &[
    (
        "cleave.bash",
        "usr/share/bash-completion/completions/cleave",
    ),
    ("_cleave", "usr/share/zsh/vendor-completions/_cleave"),
    (
        "cleave.fish",
        "usr/share/fish/vendor_completions.d/cleave.fish",
    ),
];

/// The release that is packaged.
struct Release {
    version: String,
    out: PathBuf,
    /// The tree of installed files.
    tree: PathBuf,
    /// Seconds since 1970 of the last commit: the time of all files, so that the same sources give the same packages.
    epoch: String,
}

/// Makes all archives and `SHA256SUMS`; prints their paths.
pub(crate) fn run(root: &Path, request: &Request) -> Result {
    setup::provide_programs(root, &["dpkg-deb", "rpmbuild", "strip"])?;
    let out = request
        .out
        .clone()
        .unwrap_or_else(|| root.join("target/dist"));
    let out = std::path::absolute(&out).at(&out)?;
    let program = match &request.program {
        Some(program) => program.clone(),
        None => built::released(root, "-p cleave-daemon", "cleave")?,
    };
    let release = Release {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        tree: out.join("tree"),
        epoch: line(root, "git log -1 --format=%ct", &[])?
            .trim()
            .to_owned(),
        out,
    };
    empty_folder(&release.out)?;
    step("tree", "see above", || release.plant(root, &program))?;
    step("tarball", "see above", || release.tarball())?;
    step("deb", "see above", || release.deb(root))?;
    step("rpm", "see above", || release.rpm(root))?;
    step("sums", "see above", || release.sums())?;
    match request.check {
        true => check::run(root, &release),
        false => Ok(()),
    }
}

impl Release {
    /// Lays out the tree.
    fn plant(&self, root: &Path, program: &Path) -> Result<String> {
        for (from, to) in FILES {
            self.install(&root.join(from), to)?;
        }
        self.install(program, "usr/bin/cleave")?;
        let installed = self.tree.join("usr/bin/cleave");
        self.mode(&installed, 0o755)?;
        quietly(root, &["strip", &shown(&installed)], &[])?;
        self.pages(root, program)?;
        let notices = self.tree.join("usr/share/doc/cleave/THIRD-PARTY");
        fs::write(&notices, notice::third_party(root)?).at(&notices)?;
        let changes = "usr/share/doc/cleave/changelog";
        self.install(&root.join("CHANGELOG.md"), changes)?;
        quietly(&self.tree, &["gzip", "-9n", changes], &[])?;
        let settings = self.tree.join("etc/cleave");
        fs::create_dir_all(&settings).at(&settings)?;
        line(&self.tree, "du -sk .", &[]).map(|said| format!("{} KiB", kib(&said)))
    }

    /// Man pages and completions, which the program writes itself.
    fn pages(&self, root: &Path, program: &Path) -> Result {
        let folder = self.tree.join("usr/share/man/man1");
        empty_folder(&folder)?;
        let words = [&*shown(program), "--write-pages", &shown(&folder)];
        quietly(root, &words, &[])?;
        for (from, to) in COMPLETIONS {
            let from = folder.join(from);
            self.install(&from, to)?;
            fs::remove_file(&from).at(&from)?;
        }
        quietly(&folder, &["sh", "-c", "gzip -9n *.1"], &[]).map(drop)
    }

    fn install(&self, from: &Path, to: &str) -> Result {
        let to = self.tree.join(to);
        let folder = to.parent().unwrap_or(&self.tree);
        fs::create_dir_all(folder).at(folder)?;
        fs::copy(from, &to).at(from)?;
        self.mode(&to, 0o644)
    }

    fn mode(&self, path: &Path, mode: u32) -> Result {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).at(path)
    }

    fn tarball(&self) -> Result<String> {
        let (name, epoch) = (format!("cleave-{}", self.version), &self.epoch);
        let file = format!("{name}-{}-linux.tar.gz", std::env::consts::ARCH);
        let rename = format!("--transform=s,^\\.,{name},");
        let time = format!("--mtime=@{epoch}");
        let fixed = [
            "tar",
            "--sort=name",
            "--owner=0",
            "--group=0",
            &time,
            &rename,
        ];
        let words = [&fixed[..], &["-C", "tree", "-czf", &file, "."]].concat();
        quietly(&self.out, &words, &[])?;
        Ok(file)
    }

    fn deb(&self, root: &Path) -> Result<String> {
        let package = self.out.join("deb");
        quietly(&self.out, &["cp", "-a", "tree", &shown(&package)], &[])?;
        let control = package.join("DEBIAN");
        fs::create_dir_all(&control).at(&control)?;
        let architecture = line(root, "dpkg --print-architecture", &[])?;
        let architecture = architecture.trim();
        let size = line(&self.tree, "du -sk .", &[])?;
        let template = root.join("dist/control");
        let text = fs::read_to_string(&template).at(&template)?;
        let text = text
            .replace("@version@", &self.version)
            .replace("@architecture@", architecture)
            .replace("@kib@", kib(&size))
            .replace("@glibc@", &glibc(&self.tree.join("usr/bin/cleave"))?);
        fs::write(control.join("control"), text).at(&control)?;
        fs::copy(root.join("dist/postinst"), control.join("postinst")).at("dist/postinst")?;
        self.mode(&control.join("postinst"), 0o755)?;
        let file = format!("cleave_{}_{architecture}.deb", self.version);
        let words = [
            "dpkg-deb",
            "--root-owner-group",
            "-Zxz",
            "-z4",
            "--build",
            "deb",
            &file,
        ];
        quietly(&self.out, &words, &[("SOURCE_DATE_EPOCH", &self.epoch)])?;
        fs::remove_dir_all(&package).at(&package)?;
        Ok(file)
    }

    fn rpm(&self, root: &Path) -> Result<String> {
        let define = |name: &str, value: &str| format!("--define={name} {value}");
        let build = self.out.join("rpm");
        let words = [
            "rpmbuild".to_owned(),
            "-bb".to_owned(),
            define("_topdir", &shown(&build)),
            define("_rpmdir", &shown(&self.out)),
            define(
                "_build_name_fmt",
                "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
            ),
            define("cleave_version", &self.version),
            define("cleave_tree", &shown(&self.tree)),
            define("cleave_postinst", &shown(&root.join("dist/postinst"))),
            shown(&root.join("dist/cleave.spec")),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        quietly(root, &words, &[("SOURCE_DATE_EPOCH", &self.epoch)])?;
        fs::remove_dir_all(&build).at(&build)?;
        Ok(format!(
            "cleave-{}-1.{}.rpm",
            self.version,
            std::env::consts::ARCH
        ))
    }

    fn sums(&self) -> Result<String> {
        let sum = "sha256sum *.tar.gz *.deb *.rpm > SHA256SUMS";
        quietly(&self.out, &["sh", "-c", sum], &[])?;
        Ok(shown(&self.out.join("SHA256SUMS")))
    }
}

/// The first word of what `du` prints.
fn kib(said: &str) -> &str {
    said.split_whitespace().next().unwrap_or("0")
}

/// The newest version of glibc whose symbols the program needs; the file names each of them.
fn glibc(program: &Path) -> Result<String> {
    let bytes = fs::read(program).at(program)?;
    let text = String::from_utf8_lossy(&bytes);
    let versions = text.split("GLIBC_2.").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        rest.get(..end)?.parse::<u32>().ok()
    });
    let newest = versions.max().ok_or("the program needs no glibc")?;
    Ok(format!("2.{newest}"))
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
