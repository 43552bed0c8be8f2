// Stands before every file of the prebuilt kernels. glibc 2.29 gave exp and log new versions that set
// errno in other cases; bound to those before, the kernels load wherever torch's own wheels do.
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
