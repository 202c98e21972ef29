# Where there is no network, in the folder of the source packages: builds the .debs and the .rpms in the folder `rebuilt`, has lintian
# judge the first and its source, and compares the files of both.
set -eu
out=$PWD
fail() { echo "$*" >&2; exit 1; }
rm -rf rebuilt
mkdir rebuilt

dpkg-source --extract cleave_*.dsc rebuilt/sources >rebuilt/log 2>&1 || fail "$(cat rebuilt/log)"
# -d: rustc may be there without a package of Debian's.
(cd rebuilt/sources && dpkg-buildpackage -us -uc -b -d) >rebuilt/log 2>&1 || fail "$(tail -n 40 rebuilt/log)"
lintian --allow-root --fail-on error,warning cleave_*.dsc rebuilt/cleave_*.changes >rebuilt/lintian 2>&1 ||
    fail "$(cat rebuilt/lintian)"

rpmbuild --rebuild --nodeps --define="_topdir $out/rebuilt/rpm" --define="_rpmdir $out/rebuilt" \
    --define='_build_name_fmt %%{NAME}.rpm' cleave-*.src.rpm >rebuilt/log 2>&1 || fail "$(tail -n 40 rebuilt/log)"

# Debian has a changelog and overrides of its own; zsh looks elsewhere on Fedora.
for name in cleave cleave-lab; do
    dpkg-deb --fsys-tarfile rebuilt/${name}_*.deb | tar -t | sed -e 's,^\.,,' -e '/\/$/d' -e '/changelog\.Debian/d' \
        -e '/lintian/d' -e 's,vendor-completions,site-functions,' | sort >rebuilt/deb.list
    rpm --query --package --queryformat '[%{FILEMODES:perms} %{FILENAMES}\n]' rebuilt/$name.rpm |
        sed -n 's/^-[^ ]* //p' | sort >rebuilt/rpm.list
    differ=$(diff rebuilt/deb.list rebuilt/rpm.list) || fail "the .deb and the .rpm of $name differ: $differ"
    echo "$(wc -l <rebuilt/deb.list) files in both packages of $name"
done
