//! `cargo xtask dist`: a tree of all files as they are installed, and from it a tarball, a `.deb`, a `.rpm` and an image for
//! containers.
//!
//! The program links the C library dynamically, and nothing else but libgcc_s: a statically linked glibc could load no
//! library at run time, and the packages name the oldest glibc that will do.

mod check;
mod image;
mod notice;

use std::env::consts::ARCH;
use std::fmt::Display;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, execute, quietly, words};
use cleave_rig::{built, setup};

use crate::book;
use crate::step::step;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Where to, and from what.
#[derive(clap::Args, Default)]
pub(crate) struct DistArgs {
    /// Write to this folder [default: target/dist]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package this program instead of building it, without the pages as HTML
    ///
    /// Such a package is for a test. A release, which is built here, has them in usr/share/doc/cleave/html, as `cargo xtask book`
    /// makes them.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Then install the .deb in a copy of this system (as root), check what is installed, and run the image for containers
    #[arg(long)]
    check: bool,
}

impl DistArgs {
    /// Returns the options with which the tests package the program that they have tested. Building it a second time as it is
    /// released takes more than a minute, and tells nothing about packages.
    pub(crate) fn checked(program: PathBuf) -> DistArgs {
        DistArgs {
            program: Some(program),
            check: true,
            ..DistArgs::default()
        }
    }
}

/// Files of the sources, and where they are installed.
const FILES: &str = "\
dist/cleave.service usr/lib/systemd/system/cleave.service
dist/cleave@.service usr/lib/systemd/system/cleave@.service
dist/cleave@.socket usr/lib/systemd/system/cleave@.socket
dist/cleave.sysusers usr/lib/sysusers.d/cleave.conf
dist/cleave.tmpfiles usr/lib/tmpfiles.d/cleave.conf
dist/50-cleave.json usr/share/qemu/vhost-user/50-cleave.json
dist/copyright usr/share/doc/cleave/copyright
LICENSE-APACHE usr/share/doc/cleave/LICENSE-APACHE
LICENSE-MIT usr/share/doc/cleave/LICENSE-MIT
dist/grafana.json usr/share/cleave/grafana.json
dist/kubernetes/daemonset.yaml usr/share/cleave/kubernetes/daemonset.yaml
dist/kubernetes/seccomp.json usr/share/cleave/kubernetes/seccomp.json";

/// Completions as the program writes them, and where shells look for them.
const COMPLETIONS: &str = "\
cleave.bash usr/share/bash-completion/completions/cleave
_cleave usr/share/zsh/vendor-completions/_cleave
cleave.fish usr/share/fish/vendor_completions.d/cleave.fish";

/// The release that is packaged.
struct Release {
    out: PathBuf,
    /// The tree of installed files.
    tree: PathBuf,
    /// Seconds since 1970 of the last commit: the time of all files, so that the same sources give the same packages.
    epoch: String,
}

/// Makes all archives and `SHA256SUMS`; prints their paths.
pub(crate) fn run(root: &Path, request: &DistArgs) -> Result {
    setup::provide_programs(root, &["dpkg-deb", "rpmbuild", "strip"])?;
    let out = request.out.clone();
    let out = out.unwrap_or_else(|| root.join("target/dist"));
    let out = std::path::absolute(&out).at(&out)?;
    let program = match &request.program {
        Some(program) => program.clone(),
        None => built::released(root)?,
    };
    let epoch = quietly(root, "git log -1 --format=%ct", &[])?;
    let release = Release {
        tree: out.join("tree"),
        epoch: epoch.trim().to_owned(),
        out,
    };
    empty_folder(&release.out)?;
    step("tree", "see above", || release.plant(root, &program))?;
    if request.program.is_none() {
        book::build(root, &release.documents().join("html"))?;
    }
    step("tarball", "see above", || release.tarball())?;
    step("deb", "see above", || release.deb(root))?;
    step("rpm", "see above", || release.rpm(root))?;
    step("image", "see above", || release.image().write(&release.out))?;
    step("sums", "see above", || release.sums())?;
    match request.check {
        true => check::run(root, &release.out, &release.image(), VERSION),
        false => Ok(()),
    }
}

impl Release {
    /// Lays out the tree.
    fn plant(&self, root: &Path, program: &Path) -> Result<String> {
        self.install(root, FILES)?;
        let documents = self.documents();
        book::copy(root, &book::index::pages(root)?, &documents)?;
        // Where Debian's programs look for it.
        let changelog = [documents.join("changelog.md"), documents.join("changelog")];
        copy(&changelog[0], &changelog[1], 0o644)?;
        quietly(&documents, "gzip -9n changelog", &[])?;
        let installed = self.tree.join("usr/bin/cleave");
        copy(program, &installed, 0o755)?;
        quietly(root, "strip {}", &[&installed.display()])?;
        self.pages(root, program)?;
        let notices = documents.join("THIRD-PARTY");
        fs::write(&notices, notice::third_party(root)?).at(&notices)?;
        let settings = self.tree.join("etc/cleave");
        fs::create_dir_all(&settings).at(&settings)?;
        Ok(format!("{} KiB", self.kib()?))
    }

    /// Folder of the pages: as Markdown for hosts without a browser, each with links to the others.
    fn documents(&self) -> PathBuf {
        self.tree.join("usr/share/doc/cleave")
    }

    /// Man pages and completions, which the program writes itself.
    fn pages(&self, root: &Path, program: &Path) -> Result {
        let folder = self.tree.join("usr/share/man/man1");
        empty_folder(&folder)?;
        let line = "{} --write-pages {}";
        quietly(root, line, &[&program.display(), &folder.display()])?;
        self.install(&folder, COMPLETIONS)?;
        let pack = "find . -type f ! -name '*.1' -delete && gzip -9n *.1";
        quietly(&folder, "sh -c {}", &[&pack]).map(drop)
    }

    /// Copies the files of a list into the tree.
    fn install(&self, folder: &Path, files: &str) -> Result {
        let mut files = files.lines().filter_map(|line| line.split_once(' '));
        files.try_for_each(|(from, to)| copy(&folder.join(from), &self.tree.join(to), 0o644))
    }

    fn tarball(&self) -> Result<String> {
        let (name, epoch) = (format!("cleave-{VERSION}"), &self.epoch);
        let file = format!("{name}-{ARCH}-linux.tar.gz");
        let line = format!(
            "tar --sort=name --owner=0 --group=0 --mtime=@{epoch} --transform=s,^\\.,{name}, -C tree -czf {file} ."
        );
        quietly(&self.out, &line, &[]).map(|_| file)
    }

    fn deb(&self, root: &Path) -> Result<String> {
        let package = self.out.join("deb");
        quietly(&self.out, "cp -a tree {}", &[&package.display()])?;
        let control = package.join("DEBIAN");
        let architecture = quietly(root, "dpkg --print-architecture", &[])?;
        let architecture = architecture.trim();
        for script in ["postinst", "prerm", "postrm"] {
            copy(
                &root.join("dist").join(script),
                &control.join(script),
                0o755,
            )?;
        }
        let template = root.join("dist/control");
        let text = fs::read_to_string(&template).at(&template)?;
        let text = text
            .replace("@version@", VERSION)
            .replace("@architecture@", architecture)
            .replace("@kib@", &self.kib()?)
            .replace("@glibc@", &glibc(&self.tree.join("usr/bin/cleave"))?);
        fs::write(control.join("control"), text).at(&control)?;
        let file = format!("cleave_{VERSION}_{architecture}.deb");
        let line = "env SOURCE_DATE_EPOCH={} dpkg-deb --root-owner-group -Zxz -z4 --build deb {}";
        quietly(&self.out, line, &[&self.epoch, &file])?;
        fs::remove_dir_all(&package).at(&package)?;
        Ok(file)
    }

    fn rpm(&self, root: &Path) -> Result<String> {
        let (build, scripts) = (self.out.join("rpm"), root.join("dist"));
        let name = "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm";
        let mut line = words("env SOURCE_DATE_EPOCH={} rpmbuild -bb", &[&self.epoch]);
        let definitions: [(&str, &dyn Display); 6] = [
            ("_topdir", &build.display()),
            ("_rpmdir", &self.out.display()),
            ("_build_name_fmt", &name),
            ("cleave_version", &VERSION),
            ("cleave_tree", &self.tree.display()),
            ("cleave_scripts", &scripts.display()),
        ];
        line.extend(definitions.map(|(name, value)| format!("--define={name} {value}")));
        line.push(root.join("dist/cleave.spec").display().to_string());
        execute(root, &line)?;
        fs::remove_dir_all(&build).at(&build)?;
        Ok(format!("cleave-{VERSION}-1.{ARCH}.rpm"))
    }

    fn image(&self) -> image::OciImage<'_> {
        image::OciImage {
            tree: &self.tree,
            epoch: &self.epoch,
            version: VERSION,
        }
    }

    fn sums(&self) -> Result<String> {
        let sum = "sha256sum *.tar.gz *.deb *.rpm *-oci.tar > SHA256SUMS";
        quietly(&self.out, "sh -c {}", &[&sum])?;
        Ok(self.out.join("SHA256SUMS").display().to_string())
    }

    /// Returns the size of the tree, as `du` prints it before the name.
    fn kib(&self) -> Result<String> {
        let said = quietly(&self.tree, "du -sk .", &[])?;
        Ok(said.split_whitespace().next().unwrap_or("0").to_owned())
    }
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result {
    let folder = to.parent().unwrap_or(to);
    fs::create_dir_all(folder).at(folder)?;
    fs::copy(from, to).at(from)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).at(to)
}

/// Returns the newest version of glibc whose symbols the program needs; the file names each of them.
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
